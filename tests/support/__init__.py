"""Models, strategies and oracles that tests share."""
