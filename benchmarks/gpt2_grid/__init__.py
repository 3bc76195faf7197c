"""A published grid of GPT-2 on 1, 2 and 4 devices: its peaks beside predicted ones, and a plan of our own."""
