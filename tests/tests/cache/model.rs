//! The whole cache against a naive model: random lives of chunks, exporters and leases, with everything checked after every step.
//!
//! The model knows what each exporter has where, and which leases are held. From that follows what each lease must answer, byte for byte, and what the
//! driver may have mapped. `CUDA_IPC_MODEL_SEED` repeats a run, `CUDA_IPC_MODEL_CASES` says how long it is.

mod exporters;
mod importer;
mod steps;

use cuda_ipc_tests::driver::FakeConfig;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

use crate::support::*;
use exporters::Exporters;
use importer::Importer;
use steps::sequence;

const CASES: u32 = 200;

#[test]
fn random_lives_agree_with_the_model() {
    let config = FakeConfig { devices: Some(2), ..FakeConfig::default() };
    let Some(world) = enter_with(test_name!(random_lives_agree_with_the_model), &config) else { return };
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seed = number("CUDA_IPC_MODEL_SEED").unwrap_or_else(|| std::process::id().into());
    let cases = number("CUDA_IPC_MODEL_CASES").and_then(|cases| cases.try_into().ok()).unwrap_or(CASES);
    println!("CUDA_IPC_MODEL_SEED={seed}, {cases} cases");
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());

    let exporters = core::cell::RefCell::new(Exporters::new(&world));
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 300, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let outcome = runner.run(&sequence(), |(settings, steps)| {
        let mut exporters = exporters.borrow_mut();
        exporters.begin();
        let mut importer = Importer::new(&world, settings);
        for (at, step) in steps.iter().enumerate() {
            importer.act(&mut exporters, step).map_err(|error| TestCaseError::fail(format!("step {at}, {step:?}: {error}")))?;
        }
        importer.finish().map_err(|error| TestCaseError::fail(format!("at the end: {error}")))
    });
    match outcome {
        Ok(()) => {}
        Err(TestError::Fail(why, (settings, steps))) => panic!("{why}\n{settings:?}\n{steps:#?}"),
        Err(error) => panic!("{error}"),
    }
    drop(exporters);
    world.start.assert_settles(&world.importer.fake, "the end of all");
}
