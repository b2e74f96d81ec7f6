//! A standalone ZooKeeper server.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use simba_core::spi::{Backend, ConnectUrl, async_trait};
use simba_core::{Clock, Moment, MutexName, SystemClock};
use simba_zookeeper::{ZookeeperBackend, ZookeeperConfig};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::{OnceCell, mpsc, oneshot};

use simba_measure::{Caller, Peer, Target};

use crate::stores::{curator, url};

/// The variable of a server that does not sync its disk: the disk would dominate the figures.
const UNSYNCED: &str = "SIMBA_BENCH_ZOOKEEPER";
/// The variable of the server that the tests share, used if [`UNSYNCED`] is not set.
const SHARED: &str = "SIMBA_TCK_ZOOKEEPER";

fn address() -> Result<ConnectUrl> {
    url(if std::env::var_os(UNSYNCED).is_some() { UNSYNCED } else { SHARED })
}

#[derive(Debug)]
pub(crate) struct Zookeeper;

#[async_trait]
impl Target for Zookeeper {
    fn name(&self) -> &'static str {
        "zookeeper"
    }

    async fn connect(&self) -> Result<Arc<dyn Backend>> {
        let config = ZookeeperConfig::from_url(&address()?)?;
        Ok(Arc::new(ZookeeperBackend::connect(config).await?))
    }

    async fn raw(&self, _: &Arc<dyn Backend>, mutex: MutexName) -> Result<Box<dyn Caller>> {
        static RAW: OnceCell<Arc<RawConnection>> = OnceCell::const_new();
        let connection = Arc::clone(RAW.get_or_try_init(RawConnection::connect).await?);
        let parent = format!("/simba/{mutex}");
        for path in ["/simba", &parent] {
            // Not as containers: the server deletes unused ones, and the raw caller does not create them again.
            connection.call(15, &Body::default().text(path).text("").open_acl().int(0)).await?;
        }
        Ok(Box::new(RawCaller { connection, parent, node: None }))
    }

    async fn peer(&self, samples: usize) -> Result<Option<Peer>> {
        let url = address()?;
        let host = url.hosts().first().context("the URL names no server")?;
        let (servers, hold) = (format!("{}:{}", host.name, host.port.unwrap_or(2181)), self.requeue());
        let run = move || curator::handovers(&servers, samples, hold);
        let handovers = tokio::task::spawn_blocking(run).await??;
        Ok(Some(Peer { name: "Curator's mutex", handovers }))
    }

    fn note(&self) -> Option<&'static str> {
        Some(match std::env::var_os(UNSYNCED) {
            Some(_) => "the server does not sync its disk, so the figures show the cost of the clients",
            None => "the server syncs its disk, which takes most of the measured time",
        })
    }

    fn many(&self) -> usize {
        10_000
    }

    fn requeue(&self) -> Duration {
        Duration::from_millis(5)
    }
}

/// The minimal requests of a latch. All callers share one connection, as all sessions of the backend share one.
struct RawCaller {
    connection: Arc<RawConnection>,
    parent: String,
    node: Option<String>,
}

impl RawCaller {
    async fn create(&self) -> Result<String> {
        let path = format!("{}/latch-", self.parent);
        let (error, body) =
            self.connection.call(15, &Body::default().text(&path).text("raw").open_acl().int(3)).await?;
        if error != 0 {
            bail!("a node was not created: error {error}");
        }
        text(&mut &body[..]).context("a path is expected")
    }

    /// Returns all children, sorted by their sequence numbers.
    async fn children(&self) -> Result<Vec<String>> {
        let (_, body) = self.connection.call(8, &Body::default().text(&self.parent).flag(false)).await?;
        let rest = &mut &body[..];
        let count = int(rest).context("a list is expected")?;
        let mut names: Vec<String> = (0..count).filter_map(|_| text(rest)).collect();
        names.sort_by(|one, other| number(one).cmp(number(other)));
        Ok(names)
    }
}

fn number(name: &str) -> &str {
    name.rsplit('-').next().unwrap_or(name)
}

#[async_trait]
impl Caller for RawCaller {
    async fn pairs(&mut self, count: u32) -> Result<()> {
        for _ in 0..count {
            // Sent together: only the list of the children shows which node owns the mutex.
            let (node, names) = tokio::join!(self.create(), self.children());
            self.node = Some(node?);
            if names?.len() != 1 {
                bail!("an uncontended mutex was refused");
            }
            self.release().await?;
        }
        Ok(())
    }

    async fn acquire(&mut self) -> Result<Moment> {
        let node = self.create().await?;
        let own = node.rsplit('/').next().unwrap_or_default().to_owned();
        self.node = Some(node);
        let mut woken = SystemClock.now();
        loop {
            let names = self.children().await?;
            let at = names.iter().position(|name| *name == own).context("the own node does not exist")?;
            if at == 0 {
                return Ok(woken);
            }
            let before = format!("{}/{}", self.parent, names[at - 1]);
            let deleted = self.connection.event(&before);
            let (error, _) = self.connection.call(4, &Body::default().text(&before).flag(true)).await?;
            if error == 0 {
                deleted.await?;
            }
            woken = SystemClock.now();
        }
    }

    async fn release(&mut self) -> Result<()> {
        if let Some(node) = self.node.take() {
            self.connection.call(2, &Body::default().text(&node).int(-1)).await?;
        }
        Ok(())
    }
}

// ===== protocol =====

/// A request under construction.
#[derive(Default)]
struct Body(Vec<u8>);

impl Body {
    fn int(mut self, value: i32) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    fn flag(mut self, value: bool) -> Self {
        self.0.push(u8::from(value));
        self
    }

    fn text(mut self, value: &str) -> Self {
        self.0.extend(u32::try_from(value.len()).unwrap_or_default().to_be_bytes());
        self.0.extend(value.as_bytes());
        self
    }

    fn open_acl(self) -> Self {
        self.int(1).int(31).text("world").text("anyone")
    }
}

fn int(rest: &mut &[u8]) -> Option<i32> {
    let (head, tail) = rest.split_first_chunk::<4>()?;
    *rest = tail;
    Some(i32::from_be_bytes(*head))
}

fn text(rest: &mut &[u8]) -> Option<String> {
    let length = usize::try_from(int(rest)?).ok()?;
    let (head, tail) = rest.split_at_checked(length)?;
    *rest = tail;
    String::from_utf8(head.to_vec()).ok()
}

type Answer = (i32, Vec<u8>);

/// One session with many requests in flight.
struct RawConnection {
    requests: mpsc::UnboundedSender<Vec<u8>>,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<oneshot::Sender<Answer>>,
    events: HashMap<String, Vec<oneshot::Sender<()>>>,
}

impl RawConnection {
    async fn connect() -> Result<Arc<Self>> {
        let url = address()?;
        let host = url.hosts().first().context("the URL names no server")?;
        let stream = TcpStream::connect((&*host.name, host.port.unwrap_or(2181))).await?;
        stream.set_nodelay(true)?;
        let (mut reader, mut writer) = stream.into_split();
        let mut connect = Body::default().int(44).int(0).int(0).int(0).int(60_000).int(0).int(0).int(16);
        connect.0.extend([0; 16]);
        writer.write_all(&connect.0).await?;
        let mut connected = vec![0; usize::try_from(reader.read_i32().await?)?];
        reader.read_exact(&mut connected).await?;
        let (requests, mut queue) = mpsc::unbounded_channel::<Vec<u8>>();
        let state = Arc::new(Mutex::new(State::default()));
        tokio::spawn(async move {
            while let Some(mut bytes) = queue.recv().await {
                while let Ok(more) = queue.try_recv() {
                    bytes.extend(more);
                }
                writer.write_all(&bytes).await?;
            }
            anyhow::Ok(())
        });
        let shared = Arc::clone(&state);
        tokio::spawn(async move {
            let mut reader = tokio::io::BufReader::new(reader);
            loop {
                let mut frame = vec![0; usize::try_from(reader.read_i32().await?)?];
                reader.read_exact(&mut frame).await?;
                lock(&shared).take(&frame);
            }
            #[allow(unreachable_code, reason = "sets the error type")]
            anyhow::Ok(())
        });
        Ok(Arc::new(Self { requests, state }))
    }

    async fn call(&self, kind: i32, body: &Body) -> Result<Answer> {
        let (to, answer) = oneshot::channel();
        let length = i32::try_from(body.0.len())? + 8;
        let mut request = Body::default().int(length).int(1).int(kind).0;
        request.extend(&body.0);
        {
            // Under one lock, since answers arrive in the order of the requests.
            let mut state = lock(&self.state);
            state.waiting.push_back(to);
            self.requests.send(request).ok().context("the connection is broken")?;
        }
        Ok(answer.await?)
    }

    /// Returns a receiver that completes when a watch on this node fires.
    fn event(&self, path: &str) -> oneshot::Receiver<()> {
        let (to, fired) = oneshot::channel();
        lock(&self.state).events.entry(path.to_owned()).or_default().push(to);
        fired
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn take(&mut self, frame: &[u8]) {
        const EVENT: i32 = -1;
        let rest = &mut &frame[..];
        let (xid, _, _, error) = (int(rest), int(rest), int(rest), int(rest).unwrap_or_default());
        if xid == Some(EVENT) {
            let path = int(rest).and_then(|_| int(rest)).and_then(|_| text(rest)).unwrap_or_default();
            for to in self.events.remove(&path).unwrap_or_default() {
                let _ = to.send(());
            }
        } else if let Some(to) = self.waiting.pop_front() {
            let _ = to.send((error, rest.to_vec()));
        }
    }
}
