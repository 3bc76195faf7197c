"""Guards: for which calls of a module a plan was made, and how a call differs."""
