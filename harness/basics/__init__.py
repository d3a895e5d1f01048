"""What every folder needs and that knows of no trial: text, errors, plug-ins, version and size of the machine.

Nothing here imports from another folder, and nothing needs torch.
"""
