"""The RDMA transport of TENT: one-sided READ and WRITE over reliable connections, on every usable NIC."""
