"""Published strategies beside the best plan, each at the same budgets."""
