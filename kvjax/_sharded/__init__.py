"""Operations on tables that are sharded over the devices of a mesh."""
