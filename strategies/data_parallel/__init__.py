"""The strategies in which every device runs the whole model on some rows of each batch.

Under ``ddp`` and ``zero``, each device has a process, and ``zero`` divides parameters, gradients and optimizer states
among them. Under ``dp``, one process uses several GPUs.
"""
