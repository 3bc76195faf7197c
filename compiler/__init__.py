"""The compiler: from a call of a model and a request to a module that runs its plan."""
