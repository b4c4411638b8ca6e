"""The mathematics of the update: pure functions of tensors, masks and numbers; no other part of streamppo is imported.

masked        sums, means and placement over the unmasked tokens of padded responses; shape checks
ratios        exp of a log-ratio, bounded
scan          the backward recurrence behind every multi-step estimate
advantages    GAE, its length-adaptive lambda, the sequence-level form, whitening
vtrace        off-policy returns
groups        GRPO, Dr. GRPO, RLOO, REINFORCE++, MaxRL: advantages without a critic
corrections   proximal / behavior: truncate, mask, second moment
rejections    rules that drop tokens or responses by proximal / behavior
filters       responses that leave the loss: truncated, or negative and far off-policy
proximal      proximal log-probs without a second forward pass
policy_losses current / proximal: PPO, CISPO, GSPO, sequence PPO, REINFORCE, DPPO, SAPO
value_losses  the critic's loss and its explained variance
kl            estimators, reward and loss forms, the adaptive coefficient
aggregate     one number from many tokens, additive over any split
chunked_head  log-probs and entropy from hidden states, without holding all logits
head_kernels  the same on a GPU, with one pass over logits in each direction
diagnostics   distances between the three policies, before any truncation
checks        refuses NaN and impossible log-probs at the boundary
"""
