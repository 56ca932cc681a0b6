"""Confidence intervals of the mean of few values."""


def t_factor(count: int, confidence: float = 0.95) -> float:
    """Half the width of a confidence interval of the mean of `count` >= 2 normal values [standard errors].

    The (1 + confidence) / 2 quantile of Student's t with count - 1 degrees of freedom: 12.71 for 2 values, 1.96 for many.
    """
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # imported here because it takes 0.1 s

    assert count >= 2, count
    return float(stdtrit(count - 1, (1 + confidence) / 2))
