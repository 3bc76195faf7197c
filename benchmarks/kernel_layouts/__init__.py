"""How the CPU's kernels lay out their results, beside what torch's rules for tensors without data say.

python -m benchmarks.kernel_layouts [--markdown docs/results/kernel_layouts.md] [--json FILE]

Takes torch's own samples of its operations, forward and backward, on operands in many layouts, each
operation in a process of its own. Notes each beside the file of laws: a run that was ended goes on there.
"""
