"""Intervals of means of few values."""


def t_factor(count: int, confidence: float = 0.95) -> float:
    """How many standard errors an interval of the mean of `count` >= 2 normal values reaches to either side.

    The (1 + confidence) / 2 quantile of Student's t with count - 1 degrees of freedom: 12.71 of two values, 1.96 of many.
    """
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # a tenth of a second of imports

    assert count >= 2, count
    return float(stdtrit(count - 1, (1 + confidence) / 2))
