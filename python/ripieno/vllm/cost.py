"""Whether to load the tokens of a hit or to compute them, by what both took lately."""

from __future__ import annotations

KEPT = 7 / 8
"""What a sample still counts when the next one comes."""
SAMPLES = 3
"""Samples of loading, and of computing, before which every hit is loaded."""
PROMPT_TOKENS = 256
"""Tokens that a step computes of one prompt, from which on it is a sample: a shorter one takes
mostly what every step takes."""
MARGIN_SECONDS = 0.02
"""By how much longer loading must take. Predictions are no more exact, and a step is as long."""
PROBE_SECONDS = 30.0
"""Time without a load after which one is tried, although computing should be faster."""


class Line:
    """Seconds by size: a constant and a rate, fitted to recent samples by least squares."""

    def __init__(self) -> None:
        self.samples = 0
        self.sums = [0.0] * 5
        """Of 1, sizes, seconds, squares of sizes, sizes times seconds: later samples count more."""

    def add(self, size: float, seconds: float) -> None:
        self.samples += 1
        terms = 1, size, seconds, size * size, size * seconds
        self.sums = [sum * KEPT + term for sum, term in zip(self.sums, terms, strict=True)]

    @property
    def is_known(self) -> bool:
        return self.samples >= SAMPLES

    @property
    def ratio(self) -> float:
        """Seconds for a size of 1, as if there were no constant."""
        return self.sums[2] / self.sums[1]

    def at(self, size: float) -> float:
        """Returns the seconds for a size."""
        weight, *sums = self.sums
        mean, seconds, squares, products = (sum / weight for sum in sums)
        # Sizes that are almost equal do not tell the rate: then there is no constant.
        few = 0.001 * mean * mean
        slope = products - mean * seconds + few * self.ratio
        slope /= squares - mean * mean + few
        # Neither the rate nor the constant is negative, so that no noise is extrapolated.
        slope = min(max(slope, 0.0), self.ratio)
        return seconds + slope * (size - mean)


class Cost:
    """What loading and computing cost. Sizes of loads are blocks, of steps tokens."""

    def __init__(self, adds: bool) -> None:
        """adds: loads run while a step computes, which they make longer; else between steps, so that
        a request waits for those before its own."""
        self.adds = adds
        self.loading, self.computing = Line(), Line()
        self.probes_at = 0.0
        self.declined: dict[str, bool] = {}
        """By request that had a hit: whether it was declined."""

    def computed(self, tokens: int, seconds: float) -> None:
        """Takes a step that computed a prompt and loaded nothing."""
        self.computing.add(tokens, seconds)

    def loaded(self, blocks: int, tokens: int, seconds: float) -> None:
        """Takes a load of some tokens. blocks: with those that it had to wait for; seconds: that
        the request or the step waited."""
        if self.is_known and seconds < self.compute_seconds(tokens) < self.loading.at(blocks):
            # The store is fast again. Averages would find that after many probes.
            self.loading = Line()
        self.loading.add(blocks, seconds)

    @property
    def is_known(self) -> bool:
        return self.loading.is_known and self.computing.is_known

    def compute_seconds(self, tokens: int) -> float:
        """Returns the time to compute tokens: at least that, as later tokens attend to more of them
        and steps are shared with other requests. This is the better error: a hit that is wrongly
        computed costs what it does without a store, which is bounded; one that is wrongly loaded
        from a slow store waits without a bound."""
        return tokens * self.computing.ratio

    def load_seconds(self, blocks: int, ahead: int) -> float:
        """Returns the time to load blocks behind those of other loads."""
        seconds = self.loading.at(ahead + blocks)
        return seconds - self.loading.at(ahead) if self.adds and ahead else seconds

    def is_declined(self, request: str, tokens: int, blocks: int, ahead: int, now: float) -> bool:
        """Decides on a request's hit: whether its tokens are computed. ahead: blocks of loads that
        have not ended. It is decided once: a request that waits is asked about again and again.

        It is all or nothing: loading takes a constant and a time for each block, and each token
        takes longer to compute than those before it. If the whole hit is not worth it, its begin,
        which spares the cheaper tokens, is worth even less.
        """
        if request not in self.declined:
            declines = False
            if self.is_known:
                saved = self.load_seconds(blocks, ahead) - self.compute_seconds(tokens)
                # A load in flight will tell as well as a probe.
                declines = saved > MARGIN_SECONDS and (ahead > 0 or now < self.probes_at)
            if not declines:
                self.probes_at = now + PROBE_SECONDS
            self.declined[request] = declines
        return self.declined[request]
