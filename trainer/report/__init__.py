"""``python -m trainer report RUN_FOLDER``: one HTML file that shows a run.

``run_folder`` reads what loggers, ``ModelCheckpoint`` and ``PipelineMonitor`` have left in a folder, ``charts`` draws
curves and bars as SVG, ``page`` writes the file. In: a folder. Out: a file that needs no network and no script. May
import ``strategies.planning.picture``, and neither torch nor Lightning.
"""
