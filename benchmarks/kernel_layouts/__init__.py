"""How the CPU's kernels lay out their results, beside what torch's rules for tensors without data say.

python -m benchmarks.kernel_layouts [--markdown docs/results/kernel_layouts.md] [--json FILE]

Takes torch's own samples of its operations, forward and backward, on operands in many layouts. Needs the
package `expecttest`, which torch's samples import.
"""
