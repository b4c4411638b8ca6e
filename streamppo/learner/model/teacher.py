"""The teacher of on-policy distillation: a frozen model on the learner's ranks that scores the policy's tokens."""

from torch.distributed.device_mesh import DeviceMesh

from streamppo.config.sections import Config
from streamppo.errors import ModelError, TaskError
from streamppo.learner.model import load_policy
from streamppo.learner.model.policy import Policy
from streamppo.learner.parallel.context_parallel import Slices
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.weights.models.settings import settings


def load(config: Config, model_path: str, mesh: DeviceMesh, known: Policy | None, slices: Slices) -> Policy | None:
    """Load the teacher of `config`; it is read only if it is not `known`. A collective.

    None without a teacher, and for a teacher at a url: its log-probs come with the trajectories. Rows are split into
    `slices`.

    Raises `ModelError` if its path has no model, or if it does not have the tokens of the model at `model_path`.
    """
    chosen, temperature = config.algorithm.teacher, config.rollout.temperature
    if not chosen.model:
        return None
    if known is None:
        check_tokens(chosen.model, model_path)
        known = load_policy.load(
            config.model, chosen.model, temperature, mesh, offload=chosen.offload, master=False, slices=slices
        )
    known.temperature, known.float32_head = temperature, config.model.float32_head
    return known


def check_tokens(teacher: str, model_path: str) -> None:
    """Raise `ModelError` unless every token of the model at `model_path` has the same number in the `teacher`'s."""
    try:
        theirs, ours = Tokenizer(teacher).numbers(), Tokenizer(model_path).numbers()
    except TaskError as error:
        raise ModelError(f"the teacher {teacher!r} and the policy cannot be compared: {error}") from error
    strange = sorted(token for token, number in ours.items() if theirs.get(token) != number)
    if strange:
        number = ours[strange[0]]
        raise ModelError(
            f"the teacher {teacher!r} must have the policy's tokenizer: token {number}, {strange[0]!r}, is "
            f"{theirs.get(strange[0], 'unknown')} there ({len(strange)} of {len(ours)} tokens differ)"
        )
    sizes = [settings(path).get_text_config().vocab_size for path in (teacher, model_path)]
    if sizes[0] < sizes[1]:
        raise ModelError(
            f"the teacher {teacher!r} has {sizes[0]:,} tokens and the policy {sizes[1]:,}, all of which it may sample"
        )
