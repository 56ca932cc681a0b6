"""Rules and fitted models that place all seeds at once, by growth sensors."""
