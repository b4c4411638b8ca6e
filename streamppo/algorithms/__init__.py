"""The mathematics of an update: pure functions of tensors, masks and numbers, without imports from streamppo.

Every function raises ValueError on shapes that do not fit. The configuration refuses numbers out of their range.

masked            checks, sums and ratios of masked response tokens
scan              the backward recurrence behind every multi-step estimate
advantages        GAE, its length-adaptive lambda, the sequence-level form, whitening
vtrace            off-policy returns
groups            GRPO, Dr. GRPO, RLOO, REINFORCE++, MaxRL: advantages without a critic
corrections       proximal / behavior: truncate, mask, second moment; proximal log-probs without a forward pass
rejections        rules that leave tokens or responses out of the loss
policy_losses     current / proximal of a token: PPO, CISPO, REINFORCE, SAPO, DPPO, IPO
sequence_losses   current / proximal of a response: GSPO, sequence PPO, GMPO, VESPO
value_losses      the critic's loss and its explained variance
kl                estimators; in the reward, the loss and the advantages; the adaptive coefficient
exploration       entropy control: selected tokens, an adaptive bonus
custom_functions  a user's advantage, correction and loss
lag               the adaptive lag
aggregate         one number from many tokens, additive over any split
chunked_head      log-probs and entropy from hidden states, without holding all logits
head_kernels      the same on a GPU, with one pass over logits in each direction
candidates        the tokens left by top-p and top-k
diagnostics       distances between the three policies, before any truncation
"""
