"""The main job, shown: real traffic through a real router to simulated replicas, three rules compared."""
