"""A transport whose ranks are threads of one process.

Members find each other through an ``InprocHub``, an object that the group's store shares inside the
process. Each pair of members has a frame queue for each direction. A small frame is copied into the
queue. A large frame, or any frame while the queue is full, is lent: it stays in the sender's memory
until the receiver has copied it. So the queues are bounded, and large data is copied once.
"""
