"""The `train:` section of a spec: its schema, and what follows from it for a number of workers. Without torch.

Read by the spec, the plan, the estimates and the workers (`dtctl.runtime`): all refuse the same, in the same words.
"""
