"""A verifiers environment: guess the number, with a hint after every wrong guess."""


def load_environment():
    import verifiers as vf  # pyright: ignore[reportMissingImports]
    from datasets import Dataset  # pyright: ignore[reportMissingImports]

    class Guess(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            guess, wanted = messages[-1].content, state["answer"]
            if guess == wanted:
                state["final_env_response"] = [{"role": "user", "content": "right"}]
                return state["final_env_response"]
            return [{"role": "user", "content": "higher" if int(guess) < int(wanted) else "lower"}]

    def found(completion, answer, state) -> float:
        return float(state.get("final_env_response") is not None)

    rows = [{"prompt": [{"role": "user", "content": "guess"}], "answer": str(n)} for n in range(4)]
    rubric = vf.Rubric(funcs=[found])
    return Guess(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=4)
