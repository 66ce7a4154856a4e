"""The draft room: its network, the distillation of its data, and its training. Needs torch, `checkpoint` aside."""
