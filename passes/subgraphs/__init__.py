"""Steps of several graphs under one budget."""
