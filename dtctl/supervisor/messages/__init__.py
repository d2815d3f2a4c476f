"""Messages between the control machine and a node, one family for each file. Used by both ends; stdlib, Python 3.8.

    control machine                      node
    ------------------------------------------------------------------------------------------------------------
    setup.py: before a run starts
    Hello: request a description         NodeDescription
    PushTree, PushManifestEnd, PushEnd   PushState: bring the code (receive.py)
    Prepare: check for this run          NodeReady
                                         StillWorking: every second during these two
    EndOrphanedRun: end its processes    OrphanedRunEnded; to the run's launcher, StopRequested
    attempt.py: a run
    StandBy: prepare to run this
    StartAttempt: run this               AttemptStarted, with the interface; PreloadSkipped: without preloaded modules
    ProbePorts: find a free port         PortProbed
    Ping: heartbeat                      Pong: progress of the workers (progress.py)
                                         ProgressReport: the same, before an exit and a stop
                                         WorkerExit: a process has ended  (at once)
                                         LogGap: some of a rank's output is missing
                                         MetricsBegin: metrics.jsonl is sent from its first line
    RequestStacks: stacks of the workers WorkerStack of each, then StacksEnd
    Heal: workers are lost, replace them LiveReport of each worker, several    (docs/recovery.md)
    Join: connect at this address
    StopAttempt: end its processes       AttemptStopped: remaining processes  (after all output)
    Attach: logs arrived up to here      log frames from there on
    outputs.py: dtctl fetch
    ListOutputs                          OutputRows, OutputLinks, then OutputsListed
    DigestFiles                          FileDigest of each, then DigestsEnd
    SendFiles                            contents and FileSent, of each
    shared.py: folders of job.shared
    ListShared                           SharedRows, then SharedListed
    OfferShared                          SharedOffer, digests of blocks, then SharedOfferEnd
    SendShared                           contents of blocks
    FetchShared, its files and digests   PushState, as of a push in blocks
    CommitShared, QuarantineShared       SharedCommitted
    RemoveShared                         SharedCommitted
    runs.py: runs of other control machines
    ListRuns                             RunsOnNode
    ReadLogs                             log frames, then LogsRead
    stored.py: dtctl clean
    ListStored                           StoredItems
    RemoveStored                         ItemsRemoved
    slurm.py: a machine with Slurm        (dtctl/slurm/answers.py)
    SlurmRequest, then its JSON          the answer
    probe.py: dtctl doctor               (dtctl/doctor/answers.py)
    (any)                                Refusal: the request fails
    Quit: exit

Each message is a JSON frame (frames.py) whose key `op` names its type; requests.py has the table of the requests. Both
ends reject messages of another form than given here. A node is not trusted (docs/security.md): it may be faulty, run
another version, or belong to another user now.
"""
