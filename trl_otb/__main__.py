from trl_otb.cli import main


main()
