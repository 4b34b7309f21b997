"""How many tokens of prompts a step may have beside others' tokens: learned from the times of the
steps before, since these depend on model, machine, and what is captured.
"""

#: A step that computes the next token of other tenants may take so many times as long as one
#: without prompts.
PACE = 2.0
#: A step that others may only want to join, who would wait for its end once.
LOOSE_PACE = 4.0
#: One of so many steps shows how long a step without prompts takes.
_PROBED = 16
#: Steps with at most this share of the most tokens of a step are without prompts.
_FEW = 1 / 64
#: Share of the most tokens of a step that a step has before times are known.
_UNKNOWN = 1 / 8
#: Weight of the latest step in the averages.
_LATEST = 0.1
#: A step that was held up counts as at most so many times the average.
_OUTLIER = 3.0


class StepPace:
    """The times of one scheduler's steps."""

    def __init__(self, most: int) -> None:
        """`most`: tokens in a step at most."""
        self._most = most
        self._few = max(1, int(most * _FEW))
        self._base_s = 0.0  # of a step without prompts; 0: there was none
        self._token_s = 0.0  # of each token of a prompt beyond it; 0: there was none
        self._paced = 0  # steps that kept the pace

    def learn(self, prompt_tokens: int, seconds: float) -> None:
        """Take in how long a step with so many tokens of prompts took."""
        if prompt_tokens <= self._few:
            self._base_s = _average(self._base_s, seconds)
        else:
            # at least half of a step's time is that of its prompts
            rest = max(seconds - self._base_s, seconds / 2)
            self._token_s = _average(self._token_s, rest / prompt_tokens)

    def probes(self) -> bool:
        """Return whether the next step is to be without the prompts that the pace limits: times
        learned earlier do not hold on a machine that has become slower since.
        """
        self._paced += 1
        return self._paced % _PROBED == 0

    def tokens(self, pace: float) -> int:
        """Return the tokens of prompts with which a step takes `pace` times as long as without."""
        if not self._base_s or not self._token_s:
            return int(self._most * _UNKNOWN)
        paced = (pace - 1) * self._base_s / self._token_s
        # more than few: else steps would only be learned from as if they had no prompts
        return max(self._few + 1, min(self._most, int(paced)))


def _average(before: float, latest: float) -> float:
    if not before:
        return latest
    return before + _LATEST * (min(latest, _OUTLIER * before) - before)
