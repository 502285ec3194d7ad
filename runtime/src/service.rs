//! An engine on a thread of its own, for programs with many threads.
//!
//! Any thread submits requests and reads its own answer's events; the engine's thread steps as
//! long as there is work and sleeps else. Invariant: every request that was taken gets events until
//! [`AnswerEvent::Finished`] or an error, whatever happens to the engine. Start reading at
//! [`Service::submit`] and [`Worker::run`].

use std::{
    collections::{HashMap, VecDeque},
    ops::ControlFlow,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use paceline_model::tokenizer::Tokenizer;

use crate::{
    admission::Admission,
    engine::Engine,
    error::{Result, RuntimeError},
    request::{Event, FinishReason, Flow, Outcome, Request, RequestId, TokenEvent},
    scheduler::Occupancy,
};

/// An engine that serves any number of threads.
///
/// ```
/// use std::time::Duration;
/// use paceline_model::weights::Source;
/// use paceline_runtime::{AnswerEvent, Engine, EngineOptions, Ranks, Request, Service};
///
/// let options = EngineOptions::new(Source::DEMO, None);
/// let ranks = Ranks::Threads { count: 1, timeout: Duration::from_secs(30) };
/// let service = Service::start(Engine::load(options, ranks, &mut |_done, _total| {})?)?;
/// let answers: Vec<_> = ["Once upon a time", "The dog"]
///     .iter()
///     .map(|text| service.submit(Request::new(service.tokenizer().unwrap().encode(text)?, 8)))
///     .collect::<Result<_, _>>()?;
/// for answer in answers {
///     let events = answer.collect::<Result<Vec<AnswerEvent>, _>>()?;
///     let Some(AnswerEvent::Finished(outcome)) = events.last() else { unreachable!() };
///     assert_eq!(outcome.tokens.len(), 8);
/// }
/// service.shutdown()?;
/// # Ok::<(), paceline_runtime::RuntimeError>(())
/// ```
pub struct Service {
    shared: Arc<Shared>,
    commands: Sender<Command>,
    thread: Option<JoinHandle<Engine>>,
    admission: Admission,
    tokenizer: Option<Tokenizer>,
    next_ticket: AtomicU64,
}

/// What the threads have in common.
struct Shared {
    /// Requests that were taken and are not finished.
    requests: AtomicUsize,
    /// Why the engine serves no more.
    failure: OnceLock<String>,
}

/// The events of one request, in order. Dropping it cancels the request.
///
/// As an iterator it waits for the next event as long as the engine works, and ends after
/// [`AnswerEvent::Finished`] or an error. What is not read yet is kept, but never more than the
/// whole answer.
pub struct Answer {
    events: Receiver<Result<AnswerEvent>>,
    commands: Sender<Command>,
    shared: Arc<Shared>,
    ticket: u64,
    is_over: bool,
}

/// Something that happened to a request; an [`Event`] that can be kept.
#[derive(Clone, Debug)]
pub enum AnswerEvent {
    /// Part of the prompt went through the model.
    Prefill {
        /// Tokens done.
        done: usize,
        /// Tokens in all.
        total: usize,
    },
    /// A token was chosen.
    Token(TokenEvent),
    /// Text that is complete.
    Text(String),
    /// The request is over; the last event.
    Finished(Box<Outcome>),
}

enum Command {
    Submit { ticket: u64, request: Box<Request>, events: Sender<Result<AnswerEvent>> },
    Cancel { ticket: u64 },
    Occupancy { answer: Sender<Occupancy> },
    Stop,
}

impl Service {
    /// Moves `engine` to a thread of its own. Requests that were submitted to it go on unheard.
    ///
    /// # Errors
    /// [`RuntimeError::Thread`] if the system refuses another thread.
    pub fn start(engine: Engine) -> Result<Self> {
        let shared = Arc::new(Shared { requests: AtomicUsize::new(0), failure: OnceLock::new() });
        let (commands, inbox) = mpsc::channel();
        let (admission, tokenizer) = (engine.admission().clone(), engine.tokenizer().cloned());
        let worker = Worker {
            engine,
            inbox,
            shared: Arc::clone(&shared),
            backlog: VecDeque::new(),
            listeners: HashMap::new(),
            is_stopping: false,
        };
        let builder = thread::Builder::new().name("engine".to_owned());
        let thread = builder.spawn(move || worker.run()).map_err(RuntimeError::Thread)?;
        let next_ticket = AtomicU64::new(0);
        Ok(Self { shared, commands, thread: Some(thread), admission, tokenizer, next_ticket })
    }

    /// Hands a request to the engine. Never waits.
    ///
    /// # Errors
    /// [`RuntimeError::Request`] for a request that can never be served, [`RuntimeError::Busy`]
    /// if as many are unfinished as the engine works on and lets wait, and
    /// [`RuntimeError::Stopped`] after a failure.
    pub fn submit(&self, request: Request) -> Result<Answer> {
        self.shared.check()?;
        self.admission.check(&request)?;
        let requests_max = self.admission.requests_max();
        let take = |requests| (requests < requests_max).then_some(requests + 1);
        let counted = self.shared.requests.fetch_update(Ordering::AcqRel, Ordering::Acquire, take);
        if let Err(requests) = counted {
            return Err(self.admission.busy(requests));
        }
        let ticket = self.next_ticket.fetch_add(1, Ordering::Relaxed);
        let (sender, events) = mpsc::channel();
        let command = Command::Submit { ticket, request: Box::new(request), events: sender };
        self.commands.send(command).map_err(|_| self.shared.stopped())?;
        let (commands, shared) = (self.commands.clone(), Arc::clone(&self.shared));
        Ok(Answer { events, commands, shared, ticket, is_over: false })
    }

    /// The model's tokenizer; `None` if its files hold none.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// Requests that are not finished.
    pub fn requests(&self) -> usize {
        self.shared.requests.load(Ordering::Acquire)
    }

    /// How many requests and pages are in which state, between two passes. `None` if the engine
    /// does not answer within `timeout`.
    pub fn occupancy(&self, timeout: Duration) -> Option<Occupancy> {
        let (sender, answer) = mpsc::channel();
        self.commands.send(Command::Occupancy { answer: sender }).ok()?;
        answer.recv_timeout(timeout).ok()
    }

    /// Cancels all requests, waits for the pass that is under way, and gives the engine back.
    ///
    /// # Errors
    /// [`RuntimeError::Stopped`] if it had failed.
    pub fn shutdown(mut self) -> Result<Engine> {
        let engine = self.join().ok_or_else(|| self.shared.stopped())?;
        self.shared.check()?;
        Ok(engine)
    }

    fn join(&mut self) -> Option<Engine> {
        // A thread that is over needs no telling.
        let _ = self.commands.send(Command::Stop);
        self.thread.take()?.join().ok()
    }
}

impl Drop for Service {
    /// As [`Service::shutdown`], without a word about failures.
    fn drop(&mut self) {
        self.join();
    }
}

impl Shared {
    fn check(&self) -> Result<()> {
        match self.failure.get() {
            Some(cause) => Err(RuntimeError::Stopped { cause: cause.clone() }),
            None => Ok(()),
        }
    }

    /// The error of a service whose thread is gone.
    fn stopped(&self) -> RuntimeError {
        let unknown = "its thread ended; if nobody shut it down, please report this as a bug";
        let cause = self.failure.get().map_or(unknown, String::as_str).to_owned();
        RuntimeError::Stopped { cause }
    }
}

impl Answer {
    /// The next event, if it comes within `timeout`. `None` also when the answer is over.
    pub fn next_within(&mut self, timeout: Duration) -> Option<Result<AnswerEvent>> {
        if self.is_over {
            return None;
        }
        match self.events.recv_timeout(timeout) {
            Ok(event) => Some(self.note(event)),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(self.note(Err(self.shared.stopped()))),
        }
    }

    /// Whether the last event was read.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Asks for the end of the request; what is left to read ends with its outcome.
    pub fn cancel(&self) {
        // Without a thread the request is over.
        let _ = self.commands.send(Command::Cancel { ticket: self.ticket });
    }

    fn note(&mut self, event: Result<AnswerEvent>) -> Result<AnswerEvent> {
        self.is_over = matches!(event, Err(_) | Ok(AnswerEvent::Finished(_)));
        event
    }
}

impl Iterator for Answer {
    type Item = Result<AnswerEvent>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        // The engine's thread drops the sender whatever becomes of it, and its waits are limited.
        let event = self.events.recv().unwrap_or_else(|_| Err(self.shared.stopped()));
        Some(self.note(event))
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if !self.is_over {
            self.cancel();
        }
    }
}

impl From<Event<'_>> for AnswerEvent {
    fn from(event: Event<'_>) -> Self {
        match event {
            Event::Prefill { done, total } => Self::Prefill { done, total },
            Event::Token(token) => Self::Token(token.clone()),
            Event::Text(text) => Self::Text(text.to_owned()),
            Event::Finished(outcome) => Self::Finished(Box::new(outcome.clone())),
        }
    }
}

/// The engine's thread.
struct Worker {
    engine: Engine,
    inbox: Receiver<Command>,
    shared: Arc<Shared>,
    /// Requests that do not fit into the engine's queue yet.
    backlog: VecDeque<Pending>,
    listeners: HashMap<RequestId, Listener>,
    is_stopping: bool,
}

struct Pending {
    request: Box<Request>,
    listener: Listener,
}

/// Who hears of a request.
struct Listener {
    ticket: u64,
    events: Sender<Result<AnswerEvent>>,
    place: Place,
}

/// Counts as an unfinished request while it lives.
struct Place(Arc<Shared>);

impl Worker {
    /// Serves until told to stop, or until the engine fails.
    fn run(mut self) -> Engine {
        loop {
            self.receive();
            // What is cancelled next needs no pass.
            if self.is_stopping {
                break;
            }
            self.submit();
            if let Err(error) = self.step() {
                self.fail(&error.to_string());
                break;
            }
        }
        self.end();
        self.engine
    }

    /// Takes commands: all that there are, and if there is nothing to do, waits for one.
    fn receive(&mut self) {
        if self.engine.is_idle() && self.backlog.is_empty() {
            match self.inbox.recv() {
                Ok(command) => self.obey(command),
                Err(_) => self.is_stopping = true,
            }
        }
        while let Ok(command) = self.inbox.try_recv() {
            self.obey(command);
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit { ticket, request, events } => {
                let place = Place(Arc::clone(&self.shared));
                let listener = Listener { ticket, events, place };
                self.backlog.push_back(Pending { request, listener });
            }
            Command::Cancel { ticket } => {
                let waiting =
                    self.backlog.iter().position(|pending| pending.listener.ticket == ticket);
                if let Some(pending) = waiting.and_then(|place| self.backlog.remove(place)) {
                    pending.listener.end_cancelled();
                }
                let running = self.listeners.iter().find(|(_, found)| found.ticket == ticket);
                if let Some((&id, _)) = running {
                    self.engine.cancel(id);
                }
            }
            // Whoever asked may have stopped waiting.
            Command::Occupancy { answer } => _ = answer.send(self.engine.occupancy()),
            Command::Stop => self.is_stopping = true,
        }
    }

    /// Moves requests into the engine's queue while there is room.
    fn submit(&mut self) {
        while let Some(Pending { request, listener }) = self.backlog.pop_front() {
            if !self.engine.has_room() {
                self.backlog.push_front(Pending { request, listener });
                return;
            }
            match self.engine.submit(*request) {
                Ok(id) => _ = self.listeners.insert(id, listener),
                Err(error) => listener.end(Err(error)),
            }
        }
    }

    /// Tells everyone why there will be nothing more.
    fn fail(&mut self, cause: &str) {
        // Told once; the first failure is the cause.
        let _ = self.shared.failure.set(cause.to_owned());
        let waiting = self.backlog.drain(..).map(|pending| pending.listener);
        for listener in self.listeners.drain().map(|entry| entry.1).chain(waiting) {
            listener.end(Err(RuntimeError::Stopped { cause: cause.to_owned() }));
        }
    }

    /// Cancels what is unfinished.
    fn end(&mut self) {
        self.backlog.drain(..).for_each(|pending| pending.listener.end_cancelled());
        self.listeners.keys().for_each(|&id| _ = self.engine.cancel(id));
        // One step ends what was cancelled before it.
        while !self.listeners.is_empty() {
            if let Err(error) = self.step() {
                self.fail(&error.to_string());
            }
        }
    }

    fn step(&mut self) -> Result<bool> {
        let Self { engine, listeners, .. } = self;
        engine.step(&mut |id, event| listen(listeners, id, event))
    }
}

/// Passes an event on; breaks the request off if nobody listens.
fn listen(listeners: &mut HashMap<RequestId, Listener>, id: RequestId, event: Event<'_>) -> Flow {
    if matches!(event, Event::Finished(_)) {
        if let Some(listener) = listeners.remove(&id) {
            listener.end(Ok(event.into()));
        }
        return ControlFlow::Continue(());
    }
    let Some(listener) = listeners.get(&id) else { return ControlFlow::Continue(()) };
    match listener.events.send(Ok(event.into())) {
        Ok(()) => ControlFlow::Continue(()),
        Err(_) => ControlFlow::Break(()),
    }
}

impl Listener {
    /// Sends the last event. Whoever has read it finds the request's place free.
    fn end(self, event: Result<AnswerEvent>) {
        drop(self.place);
        // Nobody may listen any more.
        let _ = self.events.send(event);
    }

    /// Tells the end of a request that never reached the engine.
    fn end_cancelled(self) {
        let outcome = Outcome::empty(FinishReason::Cancelled);
        self.end(Ok(AnswerEvent::Finished(Box::new(outcome))));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.requests.fetch_sub(1, Ordering::AcqRel);
    }
}
