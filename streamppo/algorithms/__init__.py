"""The mathematics of the update: pure torch functions of tensors, masks and numbers, and nothing else of ours.

masked        sums, means and moves over the unmasked tokens of padded responses; shape checks
ratios        exp of a log-ratio, bounded
scan          the backward recurrence behind every multi-step estimate
advantages    GAE, its length-adaptive lambda, the sequence-level form, whitening
vtrace        off-policy returns
groups        GRPO, Dr. GRPO, RLOO, REINFORCE++, MaxRL: advantages without a critic
corrections   proximal / behavior: truncate, mask, second moment
rejections    rules that drop tokens or responses by proximal / behavior
filters       responses that leave the loss: cut off, or negative and drifted
proximal      proximal log-probs without a second forward pass
policy_losses current / proximal: PPO, CISPO, GSPO, sequence PPO, REINFORCE, DPPO, SAPO
value_losses  the critic's loss and its explained variance
kl            estimators, reward and loss forms, the adaptive coefficient
aggregate     one number from many tokens, additive over any split
chunked_head  log-probs and entropy from hidden states, never holding all logits
head_kernels  the same on a GPU, with one pass over logits in each direction
diagnostics   how far apart the three policies are, before anything is truncated
checks        refuses NaN and impossible log-probs at the boundary
"""
