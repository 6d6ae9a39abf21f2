"""A worker's half: it moves blocks between the KV cache and their files."""

from vllm.logger import init_logger

import ripieno

from .layout import register
from .protocol import Reports, Tasks

# vLLM shows what is logged below its own name.
logger = init_logger("vllm.ripieno")


class Worker:
    """Moves blocks between the KV cache and its files."""

    def __init__(self, connector, kv_caches):
        self.rank = connector._vllm_config.parallel_config.rank
        self.layers = {row.layer: at for at, row in enumerate(connector.rows)}
        self.pages, pool = register(connector, kv_caches)
        rank = connector.ranks[self.rank]
        self.plane = ripieno.Plane(connector.path, rank, connector.shape, pool)
        self.tasks = Tasks()
        self.loading = []
        """Loads of this step: task and plane's job."""
        self.waited = set()
        self.saving = None
        """Saves of this step, once the first layer was saved."""
        self.saved = set()
        self.pending = []
        """Loads between steps: task, plane's job, and layers in flight."""
        self.refused = set()
        """Requests whose load between steps could not begin."""
        self.invalid = set()
        self.reports = Reports()
        logger.info(
            "ripieno: rank %d: %d layers of %d blocks of %d bytes%s",
            self.rank,
            len(self.layers),
            pool.blocks,
            connector.shape.object_bytes,
            ", copied by the CPU" if self.plane.is_bounced else "",
        )

    def begin(self, tasks):
        """Starts all loads: the first layers of all requests come first."""
        self.tasks, self.loading, self.saving = tasks, [], None
        self.waited, self.saved = set(), set()
        for load in tasks.loads:
            try:
                job = self.plane.begin_load(
                    load.files, load.blocks[: len(load.files)], load.checksums[self.rank]
                )
            except ripieno.Error as error:
                self._load_ended(load, str(error))
                if load.is_async:
                    self.refused.add(load.request)
            else:
                if load.is_async:
                    self.pending.append((load, job, list(self.layers.values())))
                else:
                    self.loading.append((load, job))
        between = [(load, job) for load, job, _ in self.pending if load in tasks.loads]
        for layer in self.layers.values():
            for _, job in self.loading + between:
                self._attempt(self.plane.start, job, layer)

    def _attempt(self, act, job, layer):
        try:
            return act(job, layer)
        except ripieno.Error:
            # The job says it when it ends.
            return True

    def wait_layer(self, name):
        layer = self.layers[name]
        if layer not in self.waited:
            self.waited.add(layer)
            for _, job in self.loading:
                self._attempt(self.plane.wait, job, layer)

    def finish_loads(self):
        """Ends this step's loads."""
        loading, self.loading = self.loading, []
        self._end_loads(loading)

    def _end_loads(self, loads):
        if not loads:
            return
        ended = self._end([job for _, job in loads])
        for load, job in loads:
            self._load_ended(load, ended[job][0])
        self.reports.lost.update(self.plane.take_lost())

    def _end(self, jobs):
        """By job: why it failed, or None; and its checksums."""
        try:
            return {report.job: (report.error, report.checksums) for report in self.plane.end(jobs)}
        except ripieno.Error as error:
            self.reports.dead = str(error)
            return dict.fromkeys(jobs, (str(error), None))

    def _load_ended(self, load, error):
        self.reports.loaded[load.id] += 1
        bad = load.blocks[len(load.files) :]
        if error is not None:
            logger.warning("ripieno: %s: %s", load.request, error)
            bad = load.blocks
        self.invalid.update(bad)
        for page in self.pages if bad else ():
            # Whatever is there might be no numbers at all.
            page[bad] = 0

    def save_layer(self, name):
        self._save(self.layers[name])

    def _save(self, layer):
        if layer in self.saved:
            return
        self.saved.add(layer)
        if self.saving is None:
            self.saving = []
            for save in self.tasks.saves:
                try:
                    job = self.plane.begin_store(save.files, save.blocks)
                except ripieno.Error as error:
                    logger.warning("ripieno: %s: %s", save.request, error)
                    job = None
                self.saving.append((save, job))
        for _, job in self.saving:
            if job is not None:
                self._attempt(self.plane.start, job, layer)

    def finish_saves(self):
        """When this returns, the blocks may be changed."""
        if not self.tasks.saves:
            return
        for layer in self.layers.values():
            # Those without a hook.
            self._save(layer)
        jobs = [job for _, job in self.saving if job is not None]
        ended = self._end(jobs)
        for save, job in self.saving:
            error, checksums = ended.get(job, (None, None))
            if error is not None:
                logger.warning("ripieno: %s: %s", save.request, error)
            # What was computed from blocks that failed to load is wrong.
            if error is not None or self.invalid:
                checksums = None
            self.reports.written.setdefault(save.id, {})[self.rank] = checksums
        self.tasks, self.saving = Tasks(), None

    def finished(self):
        """Requests whose loads between steps have ended."""
        done, rest = [], []
        for load, job, layers in self.pending:
            left = [layer for layer in layers if not self._attempt(self.plane.poll, job, layer)]
            if left:
                rest.append((load, job, left))
            else:
                done.append((load, job))
        self.pending = rest
        self._end_loads(done)
        refused, self.refused = self.refused, set()
        return {load.request for load, _ in done} | refused

    def take_invalid(self):
        invalid, self.invalid = self.invalid, set()
        return invalid

    def take_reports(self):
        reports, self.reports = self.reports, Reports()
        return reports or None

    def close(self):
        try:
            logger.info("ripieno: rank %d: %s", self.rank, self.plane.stats())
            self.plane.close()
        except ripieno.Error as error:
            logger.error("ripieno: rank %d: %s", self.rank, error)
