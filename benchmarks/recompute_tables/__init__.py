"""Published tables of recomputation beside what the strategies and irc do on the same networks."""
