"""`gpuscore batch --ray`: the same job as a pipeline of Ray Data over groups of rows."""
