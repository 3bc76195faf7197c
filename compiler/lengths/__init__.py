"""Plans for calls of any length within a range: one graph with sizes that depend on it, and few schedules."""
