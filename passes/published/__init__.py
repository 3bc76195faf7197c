"""Published methods, for comparison. The core reaches them by the table of `strategy_registry` alone."""
