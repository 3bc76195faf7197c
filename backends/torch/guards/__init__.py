"""Holds what a call is compared by, and how; `CacheEntry.bind` decides by it whether a plan is for the call.

- `call_key`: a call with all that decides which plan is for it.
- `module_state`: the submodules of a module and their settings, recorded to be compared later.
- `settings`: the values of settings, and quick comparisons of them.
- `unread_numbers`: which numbers among the arguments the forward does not look at.
- `guard_failure`: the ways in which a call differs, each with its error.
"""
