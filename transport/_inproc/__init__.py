"""A transport whose ranks are threads of one process.

Members meet in an ``InprocHub``, an object that the group's store shares inside the process. A
queue of frames leads from each member to each other one. A small frame is copied into the queue. A
large frame, or any frame while the queue is full, is lent: it stays in the sender's memory until
the receiver has copied it. So queues are bounded and large data moves once.
"""
