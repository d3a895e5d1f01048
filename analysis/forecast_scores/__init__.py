"""Forecasts that were sealed before the models they are about were trained, and how right they were."""
