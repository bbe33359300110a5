"""Starting the ranks of a node and watching over them. No torch."""
