//! Behind a proxy that spreads keys over several servers.

#![allow(clippy::unwrap_used, reason = "a test, by hand")]

mod common;

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;

use common::{Admin, Store, long, resp, soon, until};
use futures_util::future::join_all;
use simba_core::{
    Answer, Backend as _, Claim, ContenderId, ErrorKind, Intent, MutexName, Prior, Session, Simba,
};
use simba_redis::{RedisBackend, RedisConfig};
use simba_servers::{Server, Setup};

/// Enough for several batches.
const MANY: usize = 200;

/// Two servers, and a twemproxy that spreads keys over them.
struct Spread {
    servers: [Server; 2],
    proxy: Server,
}

impl Spread {
    fn start() -> Self {
        let servers = [(); 2].map(|()| Setup::redis().start().unwrap());
        let addresses: Vec<SocketAddr> = servers.iter().map(Server::address).collect();
        let proxy = Setup::nutcracker(&addresses).start().unwrap();
        Self { servers, proxy }
    }

    /// Starts a proxy that can do what twemproxy cannot, as others can: it loads scripts into every server, and sends
    /// what has no key to the first. Twemproxy decides about the rest.
    fn complete(&self) -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let (servers, spread) = (self.servers.each_ref().map(Server::address), self.proxy.address());
        // Ends with the process.
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                thread::spawn(move || serve(client, servers, spread));
            }
        });
        address
    }
}

fn serve(client: TcpStream, servers: [SocketAddr; 2], spread: SocketAddr) -> Option<()> {
    let mut client = Peer::new(client);
    let mut servers = servers.map(|server| Peer::new(TcpStream::connect(server).unwrap()));
    let mut spread = Peer::new(TcpStream::connect(spread).unwrap());
    loop {
        let (words, raw) = client.message()?;
        match words.as_str() {
            "SCRIPT" => {
                let [first, second] = &mut servers;
                first.ask(&raw)?;
                let reply = second.ask(&raw)?;
                client.send(&reply)?;
            }
            "INFO" | "TIME" => {
                let reply = servers[0].ask(&raw)?;
                client.send(&reply)?;
            }
            // As a subscription that hears nothing.
            "SUBSCRIBE" | "UNSUBSCRIBE" => {}
            _ => {
                let reply = spread.ask(&raw)?;
                client.send(&reply)?;
            }
        }
    }
}

struct Peer {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Peer {
    fn new(stream: TcpStream) -> Self {
        Self { stream, buffer: Vec::new() }
    }

    fn send(&mut self, bytes: &[u8]) -> Option<()> {
        self.stream.write_all(bytes).ok()
    }

    fn ask(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        self.send(bytes)?;
        self.message().map(|(_, raw)| raw)
    }

    /// Returns the first word and the bytes of the next command or reply.
    fn message(&mut self) -> Option<(String, Vec<u8>)> {
        loop {
            if let Some((message, length)) = resp::parse(&self.buffer).ok()? {
                let first = message.array().and_then(|words| words.first()?.text()).unwrap_or_default();
                return Some((first.to_owned(), self.buffer.drain(..length).collect()));
            }
            let mut chunk = [0; 4096];
            match self.stream.read(&mut chunk) {
                Ok(read) if read > 0 => self.buffer.extend_from_slice(&chunk[..read]),
                _ => return None,
            }
        }
    }
}

async fn backend(address: SocketAddr) -> RedisBackend {
    let config = RedisConfig::from_url(&format!("redis://{address}").parse().unwrap()).unwrap();
    RedisBackend::connect(config).await.unwrap()
}

fn mutex(n: usize) -> MutexName {
    MutexName::new(format!("spread-{n}")).unwrap()
}

async fn session(backend: &RedisBackend, n: usize) -> Box<dyn Session> {
    let claim = Claim::new(mutex(n), ContenderId::generate(), long()).with_intent(Intent::Try);
    backend.open(claim).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_mutex_is_taken_twice_behind_a_proxy_that_spreads_keys() {
    let spread = Spread::start();
    let address = spread.complete();
    let (many, alone) = (backend(address).await, backend(address).await);
    let mut sessions = Vec::new();
    for n in 0..MANY {
        sessions.push(session(&many, n).await);
    }
    // All at once: calls that would share a script.
    let answers = join_all(sessions.iter_mut().map(|session| session.contend(Prior::Nothing))).await;
    assert!(answers.iter().all(|answer| matches!(answer, Ok(Answer::Ours(_)))), "they were free");
    let mut taken_twice = 0;
    for n in 0..MANY {
        // One after the other: each call by itself.
        let answer = session(&alone, n).await.contend(Prior::Nothing).await.unwrap();
        taken_twice += usize::from(matches!(answer, Answer::Ours(_)));
    }
    assert_eq!(taken_twice, 0, "broken: of {MANY} mutexes none has two holders");
    let mut keys = Admin::at(spread.proxy.address());
    let there = (0..MANY).filter(|n| keys.int(&["EXISTS", &format!("simba:{{spread-{n}}}")]) == 1).count();
    assert_eq!(there, MANY, "broken: every key is where the proxy looks for it");
    let simba = Simba::new(many);
    let findings = simba.operate().unwrap().probe().await.unwrap().findings;
    assert!(findings.iter().any(|finding| finding.problem.contains("different servers")), "{findings:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proxy_without_scripts_is_named_in_the_error() {
    let spread = Spread::start();
    let config = RedisConfig::from_url(&spread.proxy.url().parse().unwrap()).unwrap();
    let error = soon("a connection is refused", RedisBackend::connect(config)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("twemproxy"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_probe_leaves_no_key_on_a_server_of_its_own() {
    let store = Store::private(Setup::redis());
    let (_backend, mut admin) = (store.backend().await, store.admin());
    until("the probe was made", || {
        admin.text(&["INFO", "commandstats"]).is_some_and(|stats| stats.contains("cmdstat_eval:calls=1,"))
    })
    .await;
    assert_eq!(admin.int(&["DBSIZE"]), 0);
}

/// Starts a proxy in front of a server that ends the connection at the script of a probe, as one that limits how many
/// keys a command may have.
fn hangs_up_at_many_keys(server: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    // Ends with the process.
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || {
                let mut client = Peer::new(client);
                let mut server = Peer::new(TcpStream::connect(server).unwrap());
                while let Some((words, raw)) = client.message() {
                    if words == "EVAL" || server.ask(&raw).and_then(|reply| client.send(&reply)).is_none() {
                        return;
                    }
                }
            });
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proxy_that_hangs_up_at_the_probe_is_used_without_it() {
    let store = Store::private(Setup::redis());
    let simba = Simba::new(backend(hangs_up_at_many_keys(store.address)).await);
    let lock = async {
        loop {
            match simba.locker(mutex(0)).try_lock().await {
                Ok(guard) => return guard.unwrap(),
                Err(error) => assert!(error.is_transient(), "{error}"),
            }
        }
    };
    let guard = soon("a mutex is acquired", lock).await;
    // On the same connection: none of its calls is hung up at.
    for n in 1..20 {
        simba.locker(mutex(n)).try_lock().await.unwrap().unwrap().release().await.unwrap();
    }
    guard.release().await.unwrap();
}
