"""Operations of tables that may be sharded over the devices of a mesh."""
