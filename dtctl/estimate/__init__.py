"""What memory a training needs, by arithmetic: for `dtctl advise`, and for workers that choose their strategy."""
