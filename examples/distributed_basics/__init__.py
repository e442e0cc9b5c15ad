"""The basics of ``torch.distributed``, one small program for each topic; see README.md."""
