"""What torchgpipe and GPipe published of their pipelines, and the same pipelines planned by irc."""
