"""Training scripts as people write them, with the lines that irc or torch's own methods add to each."""
