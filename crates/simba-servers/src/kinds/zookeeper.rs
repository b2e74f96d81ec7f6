//! ZooKeeper, alone or as one of an ensemble.

use std::fs;
use std::io;
use std::process::Command;

use anyhow::Result;

use super::{Kind, Place, expect};

const JAR: &str = "/usr/share/java/zookeeper.jar";
const LOG: &str = "/usr/share/java/slf4j-simple.jar";
/// What the package forgets to name, and TLS needs.
const NETTY: &str = "/usr/share/java/netty-codec.jar:/usr/share/java/netty-resolver.jar";

pub(crate) const KIND: Kind = Kind {
    name: "zookeeper",
    programs: &[
        ("javac", "default-jdk-headless"),
        (JAR, "zookeeper"),
        (LOG, "libslf4j-java"),
        // Not for the server: contenders of the kind that ours stand beside.
        ("/usr/share/java/curator-recipes.jar", "libcurator-recipes-java"),
    ],
    user: None,
    prepare,
    command,
    url: |place| format!("zookeeper://{}", place.address),
    probe,
};

/// A setting of this name goes to the file that tells a server of an ensemble which of them it is.
const MYID: &str = "myid=";

fn prepare(place: &Place) -> Result<()> {
    let (ip, port, data) = (place.address.ip(), place.port(), place.text("data"));
    fs::create_dir(place.path("data"))?;
    // Sessions end at the next tick, and tests need short ones and long ones.
    let mut settings = format!(
        "tickTime=200\ninitLimit=25\nsyncLimit=10\ndataDir={data}\n\
         clientPort={port}\nclientPortAddress={ip}\nadmin.enableServer=false\n\
         maxClientCnxns=0\nminSessionTimeout=400\nmaxSessionTimeout=120000\n\
         4lw.commands.whitelist=*\ncnxTimeout=500\n"
    );
    if place.tls {
        settings.push_str(&tls(place)?);
    }
    for line in &place.settings {
        match line.strip_prefix(MYID) {
            Some(id) => place.write("data/myid", id)?,
            None => settings.push_str(&format!("{line}\n")),
        }
    }
    place.write("zoo.cfg", &settings)
}

/// Plain text and TLS on one port; only the other server can.
fn tls(place: &Place) -> Result<String> {
    let pem = fs::read_to_string(place.path("server.key"))? + &fs::read_to_string(place.path("server.pem"))?;
    place.write("both.pem", &pem)?;
    let (own, ca) = (place.text("both.pem"), place.text("ca.pem"));
    Ok(format!(
        "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory\n\
         client.portUnification=true\nssl.clientAuth=none\n\
         ssl.keyStore.location={own}\nssl.keyStore.type=PEM\n\
         ssl.trustStore.location={ca}\nssl.trustStore.type=PEM\n"
    ))
}

fn command(place: &Place) -> Result<Command> {
    let mut command = place.program("java")?;
    command.args([
        "-Xmx256m",
        "-XX:+UseSerialGC",
        "-Dznode.container.checkIntervalMs=1000",
        "-cp",
        &format!("{JAR}:{LOG}:{NETTY}"),
    ]);
    command.arg("org.apache.zookeeper.server.quorum.QuorumPeerMain").arg(place.path("zoo.cfg"));
    Ok(command)
}

/// Succeeds when it serves clients; one without a quorum says that it does not.
fn probe(place: &Place) -> io::Result<()> {
    expect(place.address, "srvr", "Zookeeper version")
}
