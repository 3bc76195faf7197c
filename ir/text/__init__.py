"""The text form of graphs and schedules: one statement a line, printed and read back without loss.

```
irc 1
graph loss_bytes=8 {
  storage @s0 24 cpu
  storage @s1 24 cpu
  annotation keep "irc.keep(act)"
  input %x: float32[2,3]{3,1} @s0 input "0"
forward:
  relu = aten.relu.default(%x) -> %relu: float32[2,3]{3,1} @s1 loc(module="act") annotation("irc.keep(act)")
  output %relu "0"
}
schedule {
  compute relu keep(@s1)
  loss
}
```

The first line of a file says the version of the form; a text without one has this version.
A name that is not a plain identifier stands as a JSON string: `%"layer 1"`. `#` starts a comment.
A single tensor follows `->` bare; the results of an operation that returns a list stand in parentheses.
A tensor lives on the device of its storage, unless `on DEVICE` says otherwise.
Other instructions are `free @s1`, `offload @s1 to host`, `fetch @s1 from host` and `wait @s1`.
`offloaded %w disk "layer.weight"` says that a parameter lives in a tier between steps, and
`offloaded state %m: uint8[8]{1} @m disk "layer.weight"` that the state of its optimizer does.
"""

from .parser import parse_file, parse_graph, parse_program
from .printer import print_file, print_graph, print_program, print_schedule, same_graph, same_schedule

__all__ = [
    "parse_file",
    "parse_graph",
    "parse_program",
    "print_file",
    "print_graph",
    "print_program",
    "print_schedule",
    "same_graph",
    "same_schedule",
]
