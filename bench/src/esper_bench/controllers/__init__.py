"""Places all seeds at once, by growth sensors: rules and fitted models."""
