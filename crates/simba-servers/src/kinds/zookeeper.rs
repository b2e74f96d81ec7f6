//! ZooKeeper, standalone or as a member of an ensemble.

use std::fs;
use std::io;
use std::process::Command;

use anyhow::Result;

use super::{Instance, Kind, expect};

const JAR: &str = "/usr/share/java/zookeeper.jar";
const LOG: &str = "/usr/share/java/slf4j-simple.jar";
/// Libraries for TLS that the package does not depend on.
const NETTY: &str = "/usr/share/java/netty-codec.jar:/usr/share/java/netty-resolver.jar";

pub(crate) const KIND: Kind = Kind {
    name: "zookeeper",
    programs: &[
        ("javac", "default-jdk-headless"),
        (JAR, "zookeeper"),
        (LOG, "libslf4j-java"),
        // For tests with contenders that use Curator.
        ("/usr/share/java/curator-recipes.jar", "libcurator-recipes-java"),
    ],
    user: None,
    prepare,
    command,
    url: |instance| format!("zookeeper://{}", instance.address),
    probe,
};

/// The prefix of a setting for the file with the id of a server in an ensemble.
const MYID: &str = "myid=";

fn prepare(instance: &Instance) -> Result<()> {
    let (ip, port, data) = (instance.address.ip(), instance.port(), instance.text("data"));
    fs::create_dir(instance.path("data"))?;
    // Sessions end at the next tick, and tests need short and long ones.
    let mut settings = format!(
        "tickTime=200\ninitLimit=25\nsyncLimit=10\ndataDir={data}\n\
         clientPort={port}\nclientPortAddress={ip}\nadmin.enableServer=false\n\
         maxClientCnxns=0\nminSessionTimeout=400\nmaxSessionTimeout=120000\n\
         4lw.commands.whitelist=*\ncnxTimeout=500\n"
    );
    if instance.tls {
        settings.push_str(&tls(instance)?);
    }
    for line in &instance.settings {
        match line.strip_prefix(MYID) {
            Some(id) => instance.write("data/myid", id)?,
            None => settings.push_str(&format!("{line}\n")),
        }
    }
    instance.write("zoo.cfg", &settings)
}

/// Returns the settings for plain text and TLS on one port, which only the Netty server supports.
fn tls(instance: &Instance) -> Result<String> {
    let pem =
        fs::read_to_string(instance.path("server.key"))? + &fs::read_to_string(instance.path("server.pem"))?;
    instance.write("both.pem", &pem)?;
    let (own, ca) = (instance.text("both.pem"), instance.text("ca.pem"));
    Ok(format!(
        "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory\n\
         client.portUnification=true\nssl.clientAuth=none\n\
         ssl.keyStore.location={own}\nssl.keyStore.type=PEM\n\
         ssl.trustStore.location={ca}\nssl.trustStore.type=PEM\n"
    ))
}

fn command(instance: &Instance) -> Result<Command> {
    let mut command = instance.program("java")?;
    command.args([
        "-Xmx256m",
        "-XX:+UseSerialGC",
        "-Dznode.container.checkIntervalMs=1000",
        "-cp",
        &format!("{JAR}:{LOG}:{NETTY}"),
    ]);
    command.arg("org.apache.zookeeper.server.quorum.QuorumPeerMain").arg(instance.path("zoo.cfg"));
    Ok(command)
}

/// Succeeds when it serves clients; a server without a quorum answers otherwise.
fn probe(instance: &Instance) -> io::Result<()> {
    expect(instance.address, "srvr", "Zookeeper version")
}
