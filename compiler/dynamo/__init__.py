"""The backend of `torch.compile`: graphs of Dynamo under one budget."""
