"""Several pipelines: replicas, which divide the data, and pipelines that divide the layers of a replica."""
