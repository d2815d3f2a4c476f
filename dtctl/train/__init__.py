"""The `train:` section of a spec: its schema, and its consequences for a number of workers. Without torch.

The spec, the plan, the estimates and the workers (`dtctl.runtime`) use it, so all refuse the same settings with the
same errors.
"""
