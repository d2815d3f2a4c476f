"""Messages between the control machine and a node, a family in each file. Used by both ends; stdlib, Python 3.8.

    control machine                      node
    ------------------------------------------------------------------------------------------------------------
    setup.py: before a run starts
    Hello: describe yourself             NodeDescription
    PushTree, PushManifestEnd, PushEnd   PushState: bring the code (receive.py)
    Prepare: check for this run          Ready
                                         Working: still at one of these two, every second
    Sweep: end what is left of a run     Swept; to the run's launcher, StopRequested
    attempt.py: a run
    StandBy: prepare to run this
    StartAttempt: run this               Started, with the interface; Cold: without preloaded modules
    ProbePorts: which one is free        PortProbed
    Ping: are you there                  Pong: how far the workers are (progress.py)
                                         ProgressReport: the same, before an exit and a stop
                                         WorkerExit: a process has ended  (at once)
                                         LogGap: some of a rank's output is missing
                                         MetricsBegin: metrics.jsonl is sent from its first line
    Stacks: stacks of the workers        WorkerStack of each, then StacksEnd
    Heal: workers are lost, replace them LiveReport of each worker, several    (docs/recovery.md)
    Join: all are ready, meet here
    StopAttempt: end its processes       AttemptStopped: what is left     (after all output)
    Attach: logs arrived up to here      log frames from there on
    outputs.py: dtctl fetch
    ListOutputs                          OutputRows, OutputLinks, then OutputsListed
    DigestFiles                          FileDigest of each, then DigestsEnd
    SendFiles                            contents and FileSent, of each
    shared.py: folders of job.shared
    ListShared                           SharedRows, then SharedListed
    OfferShared                          SharedOffer, digests of blocks, then SharedOfferEnd
    SendShared                           contents of blocks
    TakeShared, its files and digests    PushState, as of a push in blocks
    KeepShared, SetAside                 SharedKept
    runs.py: runs of other control machines
    ListRuns                             RunsOnNode
    ReadLogs                             log frames, then LogsRead
    stored.py: dtctl clean
    ListStored                           StoredItems
    RemoveStored                         ItemsRemoved
    slurm.py: a machine with Slurm        (dtctl/slurm/answers.py)
    AskSlurm and its request             the answer
    probe.py: dtctl doctor               (dtctl/doctor/answers.py)
    (any)                                Refusal: it cannot be done
    Quit: and end yourself

Each travels as a JSON frame (frames.py) whose key `op` names it; requests.py has the table of the requests. Neither end
uses messages of another form than given here, and a node is not trusted (docs/security.md): it may be faulty, run
another version, or belong to another user by now.
"""
