"""Evaluation of irc: against torch, published tables and conformance suites. Not a part of the package."""
