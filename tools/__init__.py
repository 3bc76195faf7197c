"""What joins the other folders: the command line, `irc.optimize`, inspection and written folders."""
